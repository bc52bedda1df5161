// Each way to start a server.

package choose

import (
	"context"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgserver/container"
)

func startContainer(ctx context.Context) (*Server, error) {
	s, err := container.Start(ctx, container.Config{Settings: Settings()})
	if err != nil {
		return nil, err
	}
	return &Server{URL: s.URL("postgres"), Description: s.Description(), stop: s.Stop}, nil
}

func startLocal(ctx context.Context) (*Server, error) {
	s, err := pgserver.Start(ctx, pgserver.Config{Settings: Settings()})
	if err != nil {
		return nil, err
	}
	return &Server{URL: s.URL("postgres"), Description: s.Description(), stop: s.Stop}, nil
}
