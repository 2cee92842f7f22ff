-- TRUNCATE with both of its options, of several tables, through a foreign key, and after a row.
-- read sql proto_version=1

CREATE TABLE item (id int PRIMARY KEY);
CREATE TABLE part (item int REFERENCES item);
CREATE TABLE other (id serial);
CREATE PUBLICATION pub FOR TABLE item, part, other;

-- record
TRUNCATE other;
TRUNCATE item, part;
TRUNCATE item CASCADE;
TRUNCATE other RESTART IDENTITY;
TRUNCATE item, other RESTART IDENTITY CASCADE;
BEGIN;
INSERT INTO item VALUES (1);
TRUNCATE item, part;
INSERT INTO item VALUES (2);
COMMIT;
