CREATE TABLE customers (id int PRIMARY KEY, name text);
CREATE TABLE orders (id int PRIMARY KEY, customer_id int REFERENCES customers, region text, amount numeric(10, 2));
ALTER TABLE orders REPLICA IDENTITY FULL; -- the row filter reads a column that is not in the key
INSERT INTO customers VALUES (1, 'Ada'), (2, 'Grace');
INSERT INTO orders VALUES (1, 1, 'EMEA', 10.50), (2, 2, 'APAC', 7), (3, 1, 'EMEA', 4.25);
CREATE PUBLICATION sales FOR TABLE customers, orders WHERE (region = 'EMEA');

-- The statements that `pgsieve validate` prints for a role that is not a superuser: its rights, and the capture publication.
CREATE ROLE pgsieve LOGIN REPLICATION PASSWORD 'sieve';
GRANT SELECT ON ALL TABLES IN SCHEMA public TO pgsieve;
CREATE PUBLICATION pgsieve_shop FOR TABLE customers, orders WITH (publish_generated_columns = stored);
