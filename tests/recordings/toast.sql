-- Values kept out of line: an UPDATE that leaves them alone sends 'u', unless the old row has them.
-- read sql proto_version=1

CREATE TABLE keyed (id int PRIMARY KEY, n int, large text STORAGE EXTERNAL);
CREATE TABLE whole (n int, large text STORAGE EXTERNAL);
ALTER TABLE whole REPLICA IDENTITY FULL;
INSERT INTO keyed VALUES (1, 1, repeat('0123456789', 210));
INSERT INTO whole VALUES (1, repeat('0123456789', 210)), (2, 'small');
CREATE PUBLICATION pub FOR ALL TABLES;

-- record
UPDATE keyed SET n = 2;
UPDATE keyed SET id = 2;
UPDATE keyed SET large = 'small';
UPDATE whole SET n = 3 WHERE n = 1;
UPDATE whole SET n = 4 WHERE n = 2;
