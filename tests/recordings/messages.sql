-- pg_logical_emit_message: transactional ones come with their transaction, others at once, even if it fails.
-- read sql proto_version=1 messages=true
-- read sql proto_version=1
-- read walsender proto_version=4 streaming=parallel messages=true

CREATE TABLE item (id int PRIMARY KEY);
CREATE PUBLICATION pub FOR TABLE item;

-- record
SELECT pg_logical_emit_message(true, 'alone', 'ü');
SELECT pg_logical_emit_message(false, 'at once', '');
SELECT pg_logical_emit_message(true, '', '\x00ff'::bytea);
BEGIN;
INSERT INTO item VALUES (1);
SELECT pg_logical_emit_message(false, 'at once', 'before its neighbours');
SELECT pg_logical_emit_message(true, 'between', 'rows');
INSERT INTO item VALUES (2);
COMMIT;
BEGIN;
SELECT pg_logical_emit_message(true, 'lost', 'with its transaction');
SELECT pg_logical_emit_message(false, 'kept', 'although it is rolled back');
ROLLBACK;
