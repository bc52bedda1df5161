-- What lets other roles have their code run with the rights of the owner of pgxlock, or of the roles that call
-- its functions, and rights on the tables beyond what grant_locks() gives. One row for each: whether it
-- is an error, what it is, and the statement that mends it.
-- What each kind of role needs stands in the text of pgxlock_rights(), as in rights.sql.
-- $1 schema
WITH installed AS (
  SELECT n.oid, n.nspname, n.nspowner, r.proowner AS owner, r.prosrc, f.prosecdef AS hardened
    FROM pg_namespace n JOIN pg_proc r ON r.pronamespace = n.oid AND r.proname = 'pgxlock_rights' AND r.pronargs = 0
         JOIN pg_proc f ON f.pronamespace = n.oid AND f.proowner = r.proowner AND f.proname = 'pgxlock_renew_batch'
   WHERE n.nspname = $1::text
), needed AS (
  SELECT m[3] AS name, privilege
    FROM installed i,
         regexp_matches(
           i.prosrc,
           $$\((false|NULL)(?:::boolean)?, '([A-Z, ]+)', '(?:TABLE|SEQUENCE) ([a-z_]+)', '(\{[a-z,]*\})'::text\[\]\)$$,
           'g') m,
         unnest(string_to_array(m[2], ', ')) privilege
   WHERE m[1] = 'NULL' OR NOT i.hardened
), ours AS (
  SELECT c.oid, c.relname, c.relkind, c.relowner, c.relacl,
         -- Code with the owner's rights writes it: once hardened all of them, else the drawing of tokens and the migrations.
         i.hardened OR c.relname IN ('pgxlock_epoch', 'pgxlock_since_crash', 'pgxlock_migrations', 'pgxlock_tokens') AS owners
    FROM installed i JOIN pg_class c ON c.relnamespace = i.oid AND c.relkind IN ('r', 'v', 'S')
   WHERE starts_with(c.relname, 'pgxlock_')
      OR c.relname IN ('distributed_locks', 'distributed_lock_shares')
      OR c.relname IN (SELECT n.name FROM needed n)
), grants AS (
  SELECT o.oid, o.relname, o.relkind, o.owners, x.privilege_type AS privilege, coalesce(u.rolname, 'PUBLIC') AS grantee,
         u.oid IS NULL AS everybody,
         -- The check of a foreign key runs casts of the role that made it with the rights of the owner of this table.
         x.privilege_type = 'REFERENCES' AND NOT o.owners AS refers
    FROM ours o
    CROSS JOIN LATERAL (SELECT r.grantee, r.privilege_type FROM aclexplode(o.relacl) r
                        UNION
                        SELECT r.grantee, r.privilege_type
                          FROM pg_attribute a, aclexplode(a.attacl) r
                         WHERE a.attrelid = o.oid AND NOT a.attisdropped) x
    LEFT JOIN pg_roles u ON u.oid = x.grantee
   WHERE CASE WHEN u.oid IS NULL THEN true ELSE NOT pg_has_role(u.oid, o.relowner, 'MEMBER') END
     AND x.privilege_type <> 'SELECT'
     AND (o.owners OR x.privilege_type = 'TRIGGER' OR x.privilege_type = 'REFERENCES' AND o.relkind = 'r')
     AND NOT EXISTS (SELECT FROM needed n WHERE n.name = o.relname AND n.privilege = x.privilege_type)
), others AS (
  SELECT g.grantee, g.everybody, g.relkind = 'S' AS sequences, g.owners, g.refers,
         array_agg(DISTINCT g.relname::text ORDER BY g.relname::text) AS names,
         array_agg(DISTINCT g.privilege ORDER BY g.privilege) AS privileges
    FROM grants g GROUP BY 1, 2, 3, 4, 5
), code AS (
  SELECT pg_describe_object(d.classid, d.objid, 0) AS part, d.objid, d.classid, o.oid, o.relowner, p.proowner, p.oid AS function
    FROM ours o
    JOIN (SELECT g.tgrelid AS relation, g.tableoid, g.oid FROM pg_trigger g WHERE NOT g.tgisinternal
          UNION ALL SELECT w.ev_class, w.tableoid, w.oid FROM pg_rewrite w) e ON e.relation = o.oid
    JOIN pg_depend d ON d.classid = e.tableoid AND d.objid = e.oid AND d.refclassid = 'pg_proc'::regclass
    JOIN pg_proc p ON p.oid = d.refobjid
   WHERE o.relkind = 'r'
), creators AS (
  SELECT 'PUBLIC' AS name FROM installed i WHERE has_schema_privilege('public', i.oid, 'CREATE')
  UNION ALL
  SELECT quote_ident(u.rolname) FROM installed i, pg_roles u
   WHERE NOT u.rolsuper AND u.rolname <> 'pg_database_owner' AND NOT pg_has_role(u.oid, i.owner, 'MEMBER')
     -- else all are at the mercy of the schema's owner anyway
     AND CASE WHEN pg_has_role(u.oid, i.nspowner, 'MEMBER') THEN i.hardened
              ELSE has_schema_privilege(u.oid, i.oid, 'CREATE') AND NOT has_schema_privilege('public', i.oid, 'CREATE') END
)
SELECT true,
       format('%s runs %s of %I', c.part, pg_describe_object('pg_proc'::regclass, c.function, 0),
              pg_get_userbyid(c.proowner)),
       format('drop it as role %I (DROP TRIGGER, DROP RULE)', pg_get_userbyid(c.relowner))
  FROM code c WHERE NOT pg_has_role(c.proowner, c.relowner, 'MEMBER')
UNION ALL
SELECT true,
       format('%s of %I refers to %s, and so runs code of that role with the rights of %I',
              pg_describe_object(k.tableoid, k.oid, 0), pg_get_userbyid(c.relowner),
              pg_describe_object('pg_class'::regclass, o.oid, 0), pg_get_userbyid(o.relowner)),
       format('drop it as role %I', pg_get_userbyid(c.relowner))
  FROM ours o JOIN pg_constraint k ON k.confrelid = o.oid AND k.contype = 'f' JOIN pg_class c ON c.oid = k.conrelid
 WHERE NOT pg_has_role(c.relowner, o.relowner, 'MEMBER')
UNION ALL
SELECT true, format('%s may be of a role that may create triggers there', c.part),
       format('drop it as role %I, unless it is yours', pg_get_userbyid(c.relowner))
  FROM code c
 WHERE pg_has_role(c.proowner, c.relowner, 'MEMBER')
   AND c.classid = 'pg_trigger'::regclass
   AND EXISTS (SELECT FROM grants g WHERE g.oid = c.oid AND g.privilege = 'TRIGGER')
UNION ALL
SELECT o.owners OR o.refers,
       format('%s has %s on %s', CASE WHEN o.everybody THEN o.grantee ELSE format('role %I', o.grantee) END,
              array_to_string(o.privileges, ', '),
              array_to_string(o.names[1:5], ', ')
              || CASE WHEN cardinality(o.names) > 5 THEN format(' and %s more', cardinality(o.names) - 5) ELSE '' END),
       format('as role %I: %s', pg_get_userbyid(i.owner), CASE WHEN i.hardened THEN format('SELECT %I.harden_locks()', i.nspname)
         ELSE format('REVOKE %s ON %s%s FROM %s CASCADE', array_to_string(o.privileges, ', '),
                     CASE WHEN o.sequences THEN 'SEQUENCE ' ELSE '' END,
                     (SELECT string_agg(format('%I.%I', i.nspname, name), ', ') FROM unnest(o.names) name),
                     CASE WHEN o.everybody THEN o.grantee ELSE quote_ident(o.grantee) END) END)
  FROM installed i, others o
UNION ALL
SELECT true, format('%s may create objects in schema %I', string_agg(c.name, ', ' ORDER BY c.name), i.nspname),
       format('REVOKE CREATE ON SCHEMA %I FROM them; a schema belongs best to role %I, which owns pgxlock', i.nspname,
              pg_get_userbyid(i.owner))
  FROM installed i, creators c GROUP BY i.nspname, i.owner
UNION ALL
SELECT true,
       format('%s of %I has the name of one of pgxlock''s', pg_describe_object('pg_proc'::regclass, p.oid, 0),
              pg_get_userbyid(p.proowner)),
       'drop it, unless you trust that role with your own rights'
  FROM installed i JOIN pg_proc p ON p.pronamespace = i.oid
 WHERE NOT pg_has_role(p.proowner, i.owner, 'MEMBER')
   AND EXISTS (SELECT FROM pg_proc f WHERE f.pronamespace = i.oid AND f.proname = p.proname AND f.proowner = i.owner
                  AND (starts_with(f.proname, 'pgxlock_') OR position('"' || f.proname || '(' IN i.prosrc) > 0))
UNION ALL
SELECT true,
       format('%s of %I may be what an operator in a function of pgxlock resolves to',
              pg_describe_object('pg_operator'::regclass, x.oid, 0), pg_get_userbyid(x.oprowner)),
       'drop it, or move it to another schema'
  FROM installed i JOIN pg_operator x ON x.oprnamespace = i.oid WHERE NOT pg_has_role(x.oprowner, i.owner, 'MEMBER')
UNION ALL
SELECT true,
       format('%s belongs to %I, and pgxlock to %I', pg_describe_object('pg_class'::regclass, o.oid, 0),
              pg_get_userbyid(o.relowner), pg_get_userbyid(i.owner)),
       'ALTER ... OWNER TO one role'
  FROM installed i, ours o WHERE NOT pg_has_role(o.relowner, i.owner, 'MEMBER')
UNION ALL
SELECT false, 'unknown: there is no pgxlock_rights() to compare the rights of other roles with',
       'run migrations.Up or pgxlock migrate up'
 WHERE NOT EXISTS (SELECT FROM installed)
UNION ALL
SELECT false, format('pgxlock belongs to the superuser %I: code that got the owner''s rights would be a superuser''s', u.rolname),
       'have it owned by a role that may do nothing else'
  FROM installed i JOIN pg_roles u ON u.oid = i.owner WHERE u.rolsuper
 ORDER BY 1 DESC, 2
