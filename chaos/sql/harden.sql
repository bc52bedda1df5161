SELECT harden_locks();
SELECT grant_locks('chaos_app', 'application');
