package dbconn

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

func TestOutlastAsksAgainWhatAStatementTimeoutEnds(t *testing.T) {
	t.Parallel()
	timeout := &pgconn.PgError{Code: lockerr.StateCanceled}
	other := errors.New("another one")
	ctx, cancel := context.WithCancel(t.Context())
	for _, test := range []struct {
		answers func(asked int) error
		asked   int
		want    error
	}{
		{func(int) error { return nil }, 1, nil},
		{func(int) error { return other }, 1, other},
		{func(asked int) error {
			if asked < 5 {
				return timeout
			}
			return nil
		}, 5, nil},
		{func(int) error { return timeout }, 11, timeout},
		{func(asked int) error {
			if asked == 3 {
				cancel()
			}
			return timeout
		}, 3, timeout}, // last: ctx has ended
	} {
		asked := 0
		err := Outlast(ctx, func() error {
			asked++
			return test.answers(asked)
		})
		if asked != test.asked || !errors.Is(err, test.want) {
			t.Errorf("asked %d times, want %d; %v, want %v", asked, test.asked, err, test.want)
		}
	}
}
