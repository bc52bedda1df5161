-- Who asks, and whether that role may see what other roles' sessions do.
SELECT current_user::text, current_database()::text, pg_has_role('pg_read_all_stats', 'USAGE'),
       current_setting('server_version_num')::integer
