-- User-defined types are announced, a domain under its base type's name; values in text and binary format.
-- read sql proto_version=1
-- read sql proto_version=4 binary=true

CREATE TYPE mood AS ENUM ('sad', 'o''k');
CREATE TYPE pair AS (a int, b text);
CREATE TYPE span AS RANGE (subtype = float8);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN moods AS mood[];
CREATE TABLE users_own (id int PRIMARY KEY, m mood, p pair, s span, d positive, ms moods, mp pair[]);
CREATE TABLE built_in (
    b bool, i2 int2, i4 int4, i8 int8, f4 float4, f8 float8, n numeric, n2 numeric(12, 2), t text, v varchar(9), c char(4),
    by bytea, d date, ts timestamp, tz timestamptz(3), ti time, iv interval, u uuid, j json, jb jsonb, o oid,
    ia int[], ta text[], r int4range, mr datemultirange, ip inet, bi bit(3), mo money, p point, ch "char", na name, acl aclitem
);
CREATE PUBLICATION pub FOR ALL TABLES WITH (publish = 'insert');

-- record
INSERT INTO users_own VALUES (1, 'o''k', '(1,"a b")', '[1.5,)', 7, '{sad,NULL}', '{"(1,)"}');
INSERT INTO users_own VALUES (2);
INSERT INTO built_in VALUES (
    true, -32768, 2147483647, -9223372036854775808, 1.1, 'NaN', 1e-20, 1.5, 'é', 'v', 'c',
    '\x00ff', '0044-03-15 BC', 'infinity', '2020-01-01 00:00:00.1234+00', '24:00', '1 mon -2 days 03:04:05.6',
    'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a":  1}', '{"b": 1.50}', 4294967295,
    '[0:1][1:2]={{1,2},{3,NULL}}', '{"a\"b","",NULL}', '[1,5)', '{[2020-01-01,2020-02-01)}', '::1/64', B'101',
    1.5, '(1,2)', '\200', 'name', '=r/postgres'
);
