-- What the example writes. There is no balance to read and no row to lock: what
-- an account holds is the sum of its entries.
CREATE TABLE accounts (
  id integer PRIMARY KEY
);
CREATE TABLE entries (
  account integer NOT NULL REFERENCES accounts,
  amount  bigint  NOT NULL
);
CREATE INDEX ON entries (account);

-- Transfers that found an account busy for too long, to be made later.
CREATE TABLE postponed (
  id       bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  sender   integer NOT NULL REFERENCES accounts,
  receiver integer NOT NULL REFERENCES accounts,
  amount   bigint  NOT NULL
);
