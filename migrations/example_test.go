package migrations_test

import (
	"context"
	"fmt"
	"io/fs"
	"log"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/migrations"
)

// A program installs or upgrades the schema at its start. Several processes may do so at once.
func ExampleUp() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, nil); err != nil {
		log.Fatal(err)
	}
	status, err := migrations.Version(ctx, pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("version %d of %d is installed in schema %q", status.Installed, status.Newest, status.Schema)
}

// FS holds the files for golang-migrate and other tools.
func Example_files() {
	files, err := fs.Glob(migrations.FS, "000001_*.sql")
	if err != nil {
		log.Fatal(err)
	}
	for _, file := range files {
		fmt.Println(file)
	}
	// Output:
	// 000001_leases.down.sql
	// 000001_leases.up.sql
}
