-- Two transactions in progress at once, sent change by change: blocks alternate, savepoints and one of them abort.
-- read walsender proto_version=2 streaming=on
-- read walsender proto_version=4 streaming=parallel messages=true
-- read sql proto_version=1
-- set debug_logical_replication_streaming=immediate

CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE TABLE item (id int PRIMARY KEY, m mood);
CREATE TABLE unpublished (id int);
CREATE PUBLICATION pub FOR TABLE item;

-- record
a: BEGIN;
b: BEGIN;
a: INSERT INTO item VALUES (1, 'sad'), (2, NULL);
b: INSERT INTO item VALUES (11);
c: INSERT INTO item VALUES (21);
a: SAVEPOINT s;
a: UPDATE item SET id = 3 WHERE id = 2;
a: SAVEPOINT nested;
a: DELETE FROM item WHERE id = 1;
b: INSERT INTO item VALUES (12);
a: ROLLBACK TO s;
a: INSERT INTO item VALUES (4);
a: SELECT pg_logical_emit_message(true, 'in a stream', 'x');
a: SELECT pg_logical_emit_message(false, 'outside of it', 'y');
b: INSERT INTO unpublished VALUES (1);
b: ROLLBACK;
a: COMMIT;
b: BEGIN;
b: INSERT INTO unpublished VALUES (1);
b: COMMIT;
b: BEGIN;
b: INSERT INTO unpublished VALUES (2);
b: SAVEPOINT s;
b: INSERT INTO item VALUES (13);
b: ROLLBACK TO s;
b: COMMIT;
