-- A partitioned table published as its root and as its partitions; rows that move are a DELETE and an INSERT.
-- read sql proto_version=1

CREATE TABLE root (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);
CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (10);
CREATE TABLE high (note text, dropped int, id int NOT NULL);
ALTER TABLE high DROP COLUMN dropped;
ALTER TABLE high REPLICA IDENTITY FULL;
ALTER TABLE root ATTACH PARTITION high FOR VALUES FROM (10) TO (20);
CREATE TABLE leaves (id int PRIMARY KEY) PARTITION BY LIST (id);
CREATE TABLE leaf PARTITION OF leaves DEFAULT;
CREATE PUBLICATION pub FOR TABLE root WITH (publish_via_partition_root);
CREATE PUBLICATION parts FOR TABLE leaves;

-- record
INSERT INTO root VALUES (1, 'low'), (11, 'high');
UPDATE root SET note = 'changed';
UPDATE root SET id = 12 WHERE id = 1;
DELETE FROM root WHERE id = 11;
TRUNCATE root;
INSERT INTO leaves VALUES (1);
TRUNCATE leaves;
