-- A transaction beyond logical_decoding_work_mem: blocks of many changes, some without any that is published.
-- read walsender proto_version=2 streaming=on
-- read sql proto_version=4 streaming=parallel
-- set logical_decoding_work_mem=64kB

CREATE TABLE item (id int PRIMARY KEY);
CREATE TABLE unpublished (id int);
CREATE PUBLICATION pub FOR TABLE item;

-- record
BEGIN;
INSERT INTO item VALUES (1), (2), (3);
INSERT INTO unpublished SELECT generate_series(1, 1000);
INSERT INTO item VALUES (4);
SAVEPOINT s;
INSERT INTO item VALUES (5);
TRUNCATE item;
INSERT INTO unpublished SELECT generate_series(1, 1000);
COMMIT;
