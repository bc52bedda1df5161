-- The rows that must be there and are not, as in a database made from a dump without rows.
SELECT 'row of pgxlock_epoch' WHERE NOT EXISTS (SELECT FROM /* schema */pgxlock_epoch)
UNION ALL
SELECT 'row of pgxlock_migrations' WHERE NOT EXISTS (SELECT FROM /* schema */pgxlock_migrations)
