module github.com/pgxlock/pgxlock/chaos

go 1.26.0

replace github.com/pgxlock/pgxlock => ../

require github.com/jackc/pgx/v5 v5.12.0

require golang.org/x/sys v0.47.0

require (
	github.com/anishathalye/porcupine v1.3.1
	github.com/pgxlock/pgxlock v0.0.0-00010101000000-000000000000
)

require (
	github.com/jackc/pgerrcode v0.0.0-20220416144525-469b46aa5efa // indirect
	github.com/jackc/pgpassfile v1.0.0 // indirect
	github.com/jackc/pgservicefile v0.0.0-20240606120523-5a60cdf6a761 // indirect
	github.com/jackc/puddle/v2 v2.2.3 // indirect
	go.uber.org/goleak v1.3.0 // indirect
	golang.org/x/sync v0.22.0 // indirect
	golang.org/x/text v0.41.0 // indirect
	pgregory.net/rapid v1.3.0 // indirect
)
