CREATE ROLE chaos_app LOGIN;
CREATE TABLE writes (
  position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  process  text NOT NULL,
  op       bigint NOT NULL,
  write    bigint NOT NULL,
  key      text NOT NULL,
  token    bigint NOT NULL
);
GRANT SELECT, INSERT ON writes TO chaos_app;
SELECT grant_locks('chaos_app', 'application');
