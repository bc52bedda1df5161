-- How many workers of Citus have the metadata, so that programs can use them as they use the coordinator.
-- Only where doctor/nodes.sql has found Citus.
SELECT count(*) FROM pg_catalog.pg_dist_node n WHERE n.groupid > 0 AND n.hasmetadata
