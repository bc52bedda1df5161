-- What the demonstration writes under its locks: who is in the critical section,
-- who was, and a ledger that only holders may write.
CREATE TABLE section (inside integer NOT NULL);
INSERT INTO section VALUES (0);
CREATE TABLE turns (
  worker     text        NOT NULL,
  token      bigint      NOT NULL,
  inside     integer     NOT NULL,
  entered_at timestamptz NOT NULL,
  left_at    timestamptz NOT NULL
);
CREATE TABLE ledger (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, worker text NOT NULL, token bigint NOT NULL);
