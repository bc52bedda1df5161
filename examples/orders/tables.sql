-- What the example writes. Nothing here keeps an order from being shipped twice:
-- that is left to the claims alone, so that one can see whether they do it.
CREATE TABLE settlements (
  id        bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  shipments integer NOT NULL,
  token     bigint  NOT NULL
);
CREATE TABLE shipments (
  order_id   integer NOT NULL,
  worker     integer NOT NULL,
  settlement bigint  REFERENCES settlements
);
