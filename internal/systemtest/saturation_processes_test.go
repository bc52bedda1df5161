//go:build unix

package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// saturateUntilTold has 8 callers acquire the key all the time. argument is the child's number and
// a file, whose name is the key, and to whose end it writes its number in each of its turns.
func saturateUntilTold(newLocker func(*pgxpool.Pool) (*pgxlock.Locker, error)) func(context.Context, string, string, func(any) error) error {
	return func(ctx context.Context, url, argument string, report func(any) error) error {
		var number byte
		var path string
		if _, err := fmt.Sscanf(argument, "%d %s", &number, &path); err != nil {
			return err
		}
		file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return err
		}
		defer pool.Close()
		locks, err := newLocker(pool)
		if err != nil {
			return err
		}
		if err := testkit.HearOf(ctx, pool, locks); err != nil {
			return err
		}
		saturated, stop, err := workUntilTold(ctx, report)
		if err != nil {
			return err
		}
		defer stop()
		err = testkit.Saturate(saturated, locks, filepath.Base(path), 8, func() error {
			_, err := file.Write([]byte{number})
			return err
		})
		return errors.Join(err, locks.Close(ctx), file.Close())
	}
}

func TestSaturatedProcessesShareALockFairly(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for i, what := range []string{"saturate an advisory lock", "saturate a lease"} {
		t.Run(what, func(t *testing.T) {
			db := testkit.Roomy(t, testkit.Migrated(t), 20)
			turns := filepath.Join(t.TempDir(), fmt.Sprint("turns", i))
			children := []*child{startChild(t, what, db.URL, "0 "+turns), startChild(t, what, db.URL, "1 "+turns)}
			for _, c := range children {
				var ready string
				c.report(t, &ready)
			}
			for _, c := range children {
				c.tell(t)
			}
			testkit.UntilFair(t, what, len(children), func() []byte {
				text, err := os.ReadFile(turns)
				if err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
				return text
			})
			for _, c := range children {
				c.dismiss(t)
				c.end(t)
			}
			testkit.NoTickets(t, db)
		})
	}
}
