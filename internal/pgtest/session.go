package pgtest

import (
	"context"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
)

// Occupy keeps a statement in flight on the session until resume is called.
func Occupy(t *testing.T, session *dbconn.Session) (resume func()) {
	t.Helper()
	started, release, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- session.DoWithin(time.Hour, func(context.Context, dbconn.Querier, bool) error {
			close(started)
			<-release
			return nil
		})
	}()
	select {
	case <-started:
	case err := <-ended:
		t.Fatal(err)
	}
	return func() {
		close(release)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}
