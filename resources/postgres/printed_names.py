"""Provides SQL that detects renamed objects, because stored values may print the names of these objects.

Some types store the oid of an object, and print its name. For example, a value of regclass prints the name of a
table. If the table is renamed, the value prints another name, although no row has changed.

`PRINTED_NAMES` is a list of common table expressions without parameters, for queries of the catalog. One of them
is `printed_names(kind, digest)`. It has a row for each kind of object in `pgsieve.decoding.values.printed_names`,
with a digest of the names of all these objects. It has no rows if no column, domain or range has a type that prints
names. The digests cover only databases, roles and schemas of the server's own objects, because others cannot be renamed.
Temporary objects are not covered, because no published value names them.
"""

from pgsieve.decoding.values.printed_names import NAME_TYPE_OIDS

_PRINTING_TYPE_OIDS = ", ".join(map(str, sorted(NAME_TYPE_OIDS)))

#: The digests cover the xmin of the row with the name. So they also change if a name was changed and changed back.
#: For a relation they cover the xmin of its row type instead, because TRUNCATE writes the relation's own row
#: again. For a role they cover only the name, because the view pg_roles shows no xmin.
PRINTED_NAMES = f"""
printing as (
  select exists (select from pg_attribute where attrelid >= 16384 and attnum > 0 and atttypid in ({_PRINTING_TYPE_OIDS}))
      or exists (select from pg_type where typbasetype in ({_PRINTING_TYPE_OIDS}))
      or exists (select from pg_range where rngsubtype in ({_PRINTING_TYPE_OIDS})) as prints_names
), spaces as (
  select oid, nspname, xmin as nspxmin from pg_namespace
   where (select prints_names from printing) and nspname !~ '^pg_(temp|toast)'
), named(kinds, entry) as (
  select array['schema'], concat_ws(' ', oid, nspname, nspxmin) from spaces
  union all
  select array['role'], concat_ws(' ', oid, rolname) from pg_roles where (select prints_names from printing)
  union all
  select array['database'], concat_ws(' ', oid, datname, xmin) from pg_database
   where (select prints_names from printing) and current_setting('server_version_num')::int >= 190000  -- regdatabase
  union all
  select array['relation'], concat_ws(' ', c.oid, relname, nspname, nspxmin, t.xmin)
    from pg_class c join spaces n on n.oid = relnamespace left join pg_type t on t.oid = reltype
   where c.oid >= 16384 and relpersistence <> 't'
  union all
  select array['type', 'function', 'operator'], concat_ws(' ', t.oid, typname, nspname, nspxmin, t.xmin)
    from pg_type t join spaces n on n.oid = typnamespace where t.oid >= 16384
  union all
  select array['function'], concat_ws(' ', p.oid, proname, proargtypes, nspname, nspxmin, p.xmin)
    from pg_proc p join spaces n on n.oid = pronamespace where p.oid >= 16384
  union all
  select array['operator'], concat_ws(' ', o.oid, oprname, oprleft, oprright, nspname, nspxmin, o.xmin)
    from pg_operator o join spaces n on n.oid = oprnamespace where o.oid >= 16384
  union all
  select array['collation'], concat_ws(' ', c.oid, collname, nspname, nspxmin, c.xmin)
    from pg_collation c join spaces n on n.oid = collnamespace where c.oid >= 16384
  union all
  select array['configuration'], concat_ws(' ', c.oid, cfgname, nspname, nspxmin, c.xmin)
    from pg_ts_config c join spaces n on n.oid = cfgnamespace where c.oid >= 16384
  union all
  select array['dictionary'], concat_ws(' ', d.oid, dictname, nspname, nspxmin, d.xmin)
    from pg_ts_dict d join spaces n on n.oid = dictnamespace where d.oid >= 16384
), printed_names(kind, digest) as (
  select kind, count(*) || ' ' || sum(hashtextextended(entry, 0))
    from named cross join unnest(kinds) kind group by kind
)
"""
