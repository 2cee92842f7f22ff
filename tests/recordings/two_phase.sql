-- Prepared transactions: committed, rolled back, long after, without a row, and unknown to a slot without two_phase.
-- read walsender proto_version=3 two_phase=true
-- read sql proto_version=3

CREATE TABLE item (id int PRIMARY KEY);
CREATE TABLE unpublished (id int);
CREATE PUBLICATION pub FOR TABLE item;

-- record
BEGIN;
INSERT INTO item VALUES (1);
PREPARE TRANSACTION 'gid-1';
COMMIT PREPARED 'gid-1';
BEGIN;
INSERT INTO item VALUES (2);
PREPARE TRANSACTION 'gid ''é''';
INSERT INTO item VALUES (3);
ROLLBACK PREPARED 'gid ''é''';
BEGIN;
INSERT INTO unpublished VALUES (1);
PREPARE TRANSACTION 'empty';
BEGIN;
INSERT INTO item VALUES (4);
PREPARE TRANSACTION 'later';
COMMIT PREPARED 'empty';
INSERT INTO item VALUES (5);
COMMIT PREPARED 'later';
