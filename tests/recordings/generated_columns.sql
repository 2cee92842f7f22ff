-- Stored generated columns are sent where the publication says so, and where its column list names them.
-- read sql proto_version=4
-- since 18

CREATE TABLE item (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED);
CREATE TABLE plain (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED);
CREATE PUBLICATION pub FOR TABLE item WITH (publish_generated_columns = stored);
CREATE PUBLICATION parts FOR TABLE plain;

-- record
INSERT INTO item VALUES (1);
UPDATE item SET id = 2;
INSERT INTO plain VALUES (1);
