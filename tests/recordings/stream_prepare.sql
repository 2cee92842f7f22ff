-- Streamed transactions that are prepared.
-- read walsender proto_version=3 streaming=on two_phase=true
-- read walsender proto_version=4 streaming=parallel two_phase=true
-- set debug_logical_replication_streaming=immediate

CREATE TABLE item (id int PRIMARY KEY);
CREATE PUBLICATION pub FOR TABLE item;

-- record
BEGIN;
INSERT INTO item VALUES (1), (2);
SAVEPOINT s;
INSERT INTO item VALUES (3);
ROLLBACK TO s;
PREPARE TRANSACTION 'kept';
COMMIT PREPARED 'kept';
BEGIN;
INSERT INTO item VALUES (4);
PREPARE TRANSACTION 'lost';
ROLLBACK PREPARED 'lost';
