-- Which of the limits on connections that count for this login leaves the fewest, what it allows, and how
-- many there are, this one included. The limits of roles and databases do not concern a superuser.
SELECT l.who, l.most::bigint, l.taken::bigint
  FROM (SELECT format('role %I', r.rolname) AS who, r.rolconnlimit AS most,
               (SELECT count(*) FROM pg_stat_activity a WHERE a.usesysid = r.oid) AS taken
          FROM pg_roles r WHERE r.rolname = session_user AND NOT r.rolsuper
        UNION ALL
        SELECT format('database %I', d.datname), d.datconnlimit,
               (SELECT count(*) FROM pg_stat_activity a WHERE a.datid = d.oid AND a.usesysid IS NOT NULL)
          FROM pg_database d JOIN pg_roles r ON r.rolname = session_user AND NOT r.rolsuper WHERE d.datname = current_database()
        UNION ALL
        SELECT 'the server', current_setting('max_connections')::integer
                             - CASE WHEN r.rolsuper THEN 0 ELSE current_setting('superuser_reserved_connections')::integer END
                             - CASE WHEN r.rolsuper THEN 0
                                    ELSE coalesce(current_setting('reserved_connections', true), '0')::integer END,
               (SELECT count(*) FROM pg_stat_activity a WHERE a.datid IS NOT NULL AND a.usesysid IS NOT NULL)
          FROM pg_roles r WHERE r.rolname = session_user) l
 WHERE l.most >= 0 ORDER BY l.most - l.taken LIMIT 1
