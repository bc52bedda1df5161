package doctor_test

import (
	"context"
	"log"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/doctor"
)

// Examples without output are compiled and shown, not run: they need a server.
var (
	ctx  = context.Background()
	pool *pgxpool.Pool
)

// A program checks its database at its start, and refuses to run where locks cannot be trusted.
func ExampleCheck() {
	findings, err := doctor.Check(ctx, pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, finding := range findings {
		switch finding.Status {
		case doctor.StatusWarning:
			log.Printf("%s: %s; %s", finding.Check, finding.Detail, finding.Advice)
		case doctor.StatusError:
			log.Fatalf("%s: %s; %s", finding.Check, finding.Detail, finding.Advice)
		}
	}
}
