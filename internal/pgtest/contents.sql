-- The tables and sequences of the current database, and the statement that tells what each holds.
select case relkind when 'S' then
         pg_catalog.format('select concat_ws('' '', last_value, is_called) from %s', c.oid::pg_catalog.regclass)
       else
         pg_catalog.format('select coalesce(pg_catalog.md5(pg_catalog.string_agg(t::text, '','' order by t::text)), '''') from %s t', c.oid::pg_catalog.regclass)
       end,
       relkind = 'S', c.oid::pg_catalog.regclass::text
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = relnamespace
 where relkind in ('r', 'S') and nspname not in ('pg_catalog', 'information_schema', 'pg_toast')
 order by c.oid
