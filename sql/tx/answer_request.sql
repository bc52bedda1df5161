-- Stores the answer to a request that the caller's transaction has claimed: key, fingerprint, answer.
-- The parameters have no numbers here, because where they are written into the text an answer, which
-- may be long, would be in it twice.
SELECT /* schema */answer_request($1::text, $2::text, coalesce($3::bytea, ''))
