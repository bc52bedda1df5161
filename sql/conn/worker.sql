-- One row on a worker of Citus, whose coordinator is group 0. Only where conn/backend.sql has found the
-- table: no role but a superuser can make one in pg_catalog.
SELECT FROM pg_catalog.pg_dist_local_group g WHERE g.groupid OPERATOR(pg_catalog.>) 0 LIMIT 1
