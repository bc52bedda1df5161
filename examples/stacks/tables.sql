CREATE TABLE bookings (
  id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  event bigint NOT NULL,
  guest text   NOT NULL
);
CREATE TABLE shipments (order_id bigint NOT NULL);
CREATE TABLE payments (
  id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  amount bigint NOT NULL
);
CREATE TABLE settlements (day date NOT NULL, total bigint NOT NULL);
