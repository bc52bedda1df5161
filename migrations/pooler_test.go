// Migrations through a pooler, whose server sessions other clients use next.

package migrations_test

import (
	"context"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestMigrationsWorkThroughAPoolerAndLeaveItsSessionsAsTheyWere(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{})
	direct := pgtest.Pool(t, server.URL("postgres"))
	for _, setting := range []string{"default_transaction_read_only = on", "default_transaction_isolation = 'serializable'", "statement_timeout = '50s'"} {
		_, err := direct.Exec(t.Context(), "alter role postgres set "+setting) // were one of ours not made, this would show
		must(t, err)
	}
	writes := pgtest.Pool(t, server.URL("postgres")+"&options=-cdefault_transaction_read_only%3Doff")
	for _, schema := range []string{"", "locks"} {
		pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
			pool, cfg := pgtest.Pool(t, pooler.URL("postgres")), &migrations.Config{Schema: schema}
			before := pgtest.ServerSessions(t, server, pooler)
			leavesNothing := func(step string, err error) {
				t.Helper()
				if err != nil {
					t.Fatalf("%s: %v", step, err)
				}
				pgtest.SameSessions(t, step, before, pgtest.ServerSessions(t, server, pooler))
			}
			refused := func(do func(context.Context, *pgxpool.Pool, *migrations.Config) error, code string) error {
				refuse(t, do(t.Context(), pool, cfg), code)
				return nil
			}
			shows := func(want uint) error {
				got, err := migrations.Version(t.Context(), pool, cfg)
				if got.Installed != want {
					t.Errorf("version %d, want %d", got.Installed, want)
				}
				return err
			}
			leavesNothing("Version of nothing", shows(0))
			leavesNothing("Up", migrations.Up(t.Context(), pool, cfg))
			leavesNothing("Up again", migrations.Up(t.Context(), pool, cfg))
			leavesNothing("Version", shows(newest))
			leavesNothing("Repair", migrations.Repair(t.Context(), pool, cfg))
			prefix := ""
			if schema != "" {
				prefix = schema + "."
			}
			expect(t, writes, true, "select "+prefix+"claim_once('k', null, '1 hour')")
			leavesNothing("Down refused", refused(migrations.Down, pgerrcode.ObjectInUse))
			cfg.Force = true
			leavesNothing("Down", migrations.Down(t.Context(), pool, cfg))
			leavesNothing("Version in the end", shows(0))
		})
	}
}
