-- Gives back one lease, as release.sql does each of a batch: values in place of arrays.
SELECT /* schema */pgxlock_release_one($1::text, $2::text, $3::bigint)
