-- Column lists and row filters: columns outside of the list do not exist, an UPDATE may become an INSERT or DELETE.
-- read sql proto_version=3

CREATE TABLE item (id int PRIMARY KEY, hidden text, note text);
CREATE TABLE filtered (id int PRIMARY KEY, n int);
ALTER TABLE filtered REPLICA IDENTITY FULL;
CREATE PUBLICATION pub FOR TABLE item (id, note), filtered WHERE (n > 0);

-- record
INSERT INTO item VALUES (1, 'secret', 'seen');
UPDATE item SET hidden = 'other';
DELETE FROM item;
INSERT INTO filtered VALUES (1, 0), (2, 1), (3, 1);
UPDATE filtered SET n = 1 - n WHERE id < 3;
UPDATE filtered SET n = 2 WHERE id = 3;
DELETE FROM filtered;
