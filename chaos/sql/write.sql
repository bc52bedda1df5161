INSERT INTO writes (process, op, write, key, token) VALUES ($1, $2, $3, $4, $5)
