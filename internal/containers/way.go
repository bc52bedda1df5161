package containers

import (
	"context"
	"errors"

	"github.com/pgxlock/pgxlock/internal/pgserver/choose"
)

// Way is the way to a server for tests that a container is.
func Way(ctx context.Context) (*choose.Server, error) {
	s, err := Start(ctx, Config{Settings: choose.Settings()})
	if err != nil {
		if errors.Is(err, ErrNoEngine) || errors.Is(err, ErrNoImage) {
			err = choose.Absent(err)
		}
		return nil, err
	}
	server := choose.NewServer(s.URL("postgres"), s.Description(), s.Stop)
	server.Container = true
	return server, nil
}
