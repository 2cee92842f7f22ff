-- A relation is described again after whatever may have changed it, also within a transaction and within a stream.
-- read sql proto_version=1
-- read walsender proto_version=2 streaming=on
-- set logical_decoding_work_mem=64kB

CREATE TABLE item (id int PRIMARY KEY, note text);
CREATE TABLE filler (n int);
CREATE TABLE second (id int PRIMARY KEY);
CREATE PUBLICATION pub FOR TABLE item;

-- record
INSERT INTO item VALUES (1, 'a');
ALTER TABLE item RENAME COLUMN note TO remark;
INSERT INTO item VALUES (2, 'b');
BEGIN;
INSERT INTO item VALUES (3, 'c');
ALTER TABLE item ADD COLUMN n numeric(4, 1) DEFAULT 1.5, ALTER COLUMN id TYPE bigint;
UPDATE item SET remark = 'd' WHERE id = 3;
INSERT INTO filler SELECT generate_series(1, 1000);
SAVEPOINT s;
ALTER TABLE item DROP COLUMN remark;
INSERT INTO item VALUES (4, 2);
INSERT INTO filler SELECT generate_series(1, 1000);
ROLLBACK TO s;
INSERT INTO item VALUES (5, 'e', 3);
INSERT INTO filler SELECT generate_series(1, 1000);
COMMIT;
ALTER TABLE item REPLICA IDENTITY FULL;
DELETE FROM item WHERE id = 1;
TRUNCATE item;
INSERT INTO item VALUES (6, 'f', 4);
ALTER TABLE item RENAME TO renamed;
INSERT INTO renamed VALUES (7, 'g', 5);
INSERT INTO second VALUES (1);
ALTER PUBLICATION pub ADD TABLE second;
INSERT INTO second VALUES (2);
INSERT INTO renamed VALUES (8, 'h', 6);
