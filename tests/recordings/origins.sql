-- What came to the publisher by replication says from where, unless origin = none leaves it out.
-- read sql proto_version=1
-- read sql proto_version=4 origin=none
-- read walsender proto_version=4 streaming=on origin=any
-- set debug_logical_replication_streaming=immediate

CREATE TABLE item (id int PRIMARY KEY);
CREATE PUBLICATION pub FOR TABLE item;
SELECT pg_replication_origin_create('elsewhere');

-- record
SELECT pg_replication_origin_session_setup('elsewhere');
BEGIN;
SELECT pg_replication_origin_xact_setup('0/AABB', '2020-01-01 00:00+00');
INSERT INTO item VALUES (1);
COMMIT;
SELECT pg_replication_origin_session_reset();
INSERT INTO item VALUES (2);
SELECT pg_replication_origin_drop('elsewhere');
