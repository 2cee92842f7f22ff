-- Inserts, updates and deletes with each replica identity, NULL, empty rows and names that need quotes.
-- read sql proto_version=1
-- read sql proto_version=4 binary=true

CREATE TABLE keyed (id int PRIMARY KEY, note text);
CREATE TABLE whole (id int, note text);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE indexed (a int, b int NOT NULL);
CREATE UNIQUE INDEX indexed_b ON indexed (b);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_b;
CREATE TABLE nothing ();
CREATE SCHEMA "Größe";
CREATE TABLE "Größe"."t "" x" (id int);
ALTER TABLE "Größe"."t "" x" REPLICA IDENTITY NOTHING;
CREATE PUBLICATION pub FOR TABLE keyed, whole, indexed;
CREATE PUBLICATION inserts FOR TABLE nothing, "Größe"."t "" x" WITH (publish = 'insert');

-- record
BEGIN;
INSERT INTO keyed VALUES (1, 'é'), (2, NULL), (3, '');
UPDATE keyed SET note = 'the key stays' WHERE id = 1;
UPDATE keyed SET id = 4 WHERE id = 1;
UPDATE keyed SET note = note WHERE id = 4;
DELETE FROM keyed WHERE id = 2;
COMMIT;
INSERT INTO keyed VALUES (3, 'x') ON CONFLICT (id) DO UPDATE SET note = 'upserted';
INSERT INTO whole VALUES (1, NULL);
UPDATE whole SET id = 2;
DELETE FROM whole;
INSERT INTO indexed VALUES (1, 2);
UPDATE indexed SET a = 3;
UPDATE indexed SET b = 4;
DELETE FROM indexed;
INSERT INTO nothing DEFAULT VALUES;
INSERT INTO "Größe"."t "" x" VALUES (NULL);
BEGIN;
INSERT INTO keyed VALUES (5, 'rolled back');
ROLLBACK;
BEGIN;
INSERT INTO keyed VALUES (6, 'stays');
SAVEPOINT s;
INSERT INTO keyed VALUES (7, 'rolled back');
ROLLBACK TO s;
INSERT INTO keyed VALUES (8, 'stays');
COMMIT;
