-- For each kind of role: what it needs and the current role lacks, the statements that grant that,
-- whether the current role was granted a right that no kind after it needs, and the owner of the functions. The kinds stand in
-- this order because a right that several need shows the most modest of them. The text of
-- pgxlock_rights() is read, because a role without rights may not call it.
-- $1 schema
WITH installed AS (
  SELECT n.oid, n.nspname, n.nspowner, r.proowner, r.prosrc, f.prosecdef AS hardened,
         pg_has_role(r.proowner, n.nspowner, 'USAGE') AS grants_usage              -- by grant_locks()
    FROM pg_namespace n JOIN pg_proc r ON r.pronamespace = n.oid AND r.proname = 'pgxlock_rights' AND r.pronargs = 0
         JOIN pg_proc f ON f.pronamespace = n.oid AND f.proowner = r.proowner AND f.proname = 'pgxlock_renew_batch'
   WHERE n.nspname = $1::text
), kind AS (
  SELECT k.name, k.n FROM unnest('{application,administration,monitoring}'::text[]) WITH ORDINALITY AS k (name, n)
), function AS (
  SELECT split_part(signature, '(', 1) AS name, rtrim(split_part(signature, '(', 2), ')') AS arguments, m[1]::text[] AS kinds
    FROM installed i, regexp_matches(i.prosrc, $$\('(\{[a-z,]*\})'::text\[\], '(\{"[^']+"\})'::text\[\]\)$$, 'g') m,
         unnest(m[2]::text[]) signature
), relation AS (
  SELECT m[3] AS name, privilege, array_agg(DISTINCT kind) AS kinds
    FROM installed i,
         regexp_matches(
           i.prosrc,
           $$\((false|NULL)(?:::boolean)?, '([A-Z, ]+)', '(?:TABLE|SEQUENCE) ([a-z_]+)', '(\{[a-z,]*\})'::text\[\]\)$$,
           'g') m,
         unnest(string_to_array(m[2], ', ')) privilege, unnest(m[4]::text[]) kind
   WHERE m[1] = 'NULL' OR NOT i.hardened
   GROUP BY m[3], privilege
), needed AS (                              -- where it is not hardened grant_locks() grants no functions: PUBLIC may call them
  SELECT f.kinds, 'EXECUTE' AS privilege, p.proname::text AS object,
         has_function_privilege(p.oid, 'EXECUTE') AS held, has_function_privilege('public', p.oid, 'EXECUTE') AS everybodys,
         CASE WHEN NOT i.hardened
              THEN format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA %I TO %I', i.nspname, current_user) END AS mend,
         i.proowner AS owner
    FROM installed i, function f
    JOIN pg_proc p
      ON p.proname = f.name
     AND string_to_array(p.proargtypes::text, ' ')::oid[] = string_to_array(f.arguments, ', ')::regtype[]::oid[]
   WHERE p.pronamespace = i.oid
  UNION ALL
  SELECT r.kinds, r.privilege, c.relname,
         CASE c.relkind WHEN 'S' THEN has_sequence_privilege(c.oid, r.privilege) ELSE has_table_privilege(c.oid, r.privilege) END,
         CASE c.relkind WHEN 'S' THEN has_sequence_privilege('public', c.oid, r.privilege)
                        ELSE has_table_privilege('public', c.oid, r.privilege) END,
         NULL, i.proowner
    FROM installed i, relation r JOIN pg_class c ON c.relname = r.name
   WHERE c.relnamespace = i.oid
  UNION ALL                                 -- of a schema that has other objects, too, it shows nothing
  SELECT (SELECT array_agg(k.name) FROM kind k), 'USAGE', format('schema %I', i.nspname),
         has_schema_privilege(i.oid, 'USAGE'), true,
         CASE WHEN NOT i.grants_usage THEN format('GRANT USAGE ON SCHEMA %I TO %I', i.nspname, current_user) END,
         CASE WHEN i.grants_usage THEN i.proowner ELSE i.nspowner END
    FROM installed i
), lacked AS (
  SELECT k.name AS kind, d.privilege, d.object, pg_get_userbyid(d.owner) AS owner,
         coalesce(d.mend, format('SELECT %I.grant_locks(%L, %L)', i.nspname, current_user, k.name)) AS mend
    FROM installed i, needed d JOIN kind k ON k.name = ANY (d.kinds) WHERE NOT d.held
)
SELECT k.name,
       coalesce((SELECT string_agg(g.privileges || ' on ' || g.objects, '; ' ORDER BY g.privileges)
          FROM (SELECT o.privileges, string_agg(o.object, ', ' ORDER BY o.object) AS objects
                  FROM (SELECT l.object, string_agg(l.privilege, ', ' ORDER BY l.privilege) AS privileges
                          FROM lacked l
                         WHERE l.kind = k.name
                         GROUP BY l.object) o
                 GROUP BY o.privileges) g), ''),
       coalesce((SELECT string_agg(format('as role %I: %s', m.owner, m.mend), '; ' ORDER BY m.mend COLLATE "C")
          FROM (SELECT DISTINCT l.owner, l.mend FROM lacked l WHERE l.kind = k.name) m), ''),
       EXISTS (SELECT FROM needed d
                WHERE d.held AND NOT d.everybodys AND k.n = (SELECT max(o.n) FROM kind o WHERE o.name = ANY (d.kinds))),
       pg_get_userbyid(i.proowner)::text
  FROM installed i, kind k WHERE EXISTS (SELECT FROM function) AND EXISTS (SELECT FROM relation)
 ORDER BY k.n
