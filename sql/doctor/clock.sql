-- The server's clock, in microseconds since 1970: however the role wants dates shown.
SELECT (pg_catalog.extract('epoch', pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8
