// Package containers runs PostgreSQL in a Docker container through
// testcontainers-go. Whether there is an engine and an image is found out
// first, and quickly, so that a machine without them can go another way.
package containers

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/testcontainers/testcontainers-go"
)

// ImageEnv is the environment variable that names the image.
const ImageEnv = "PGXLOCK_TEST_IMAGE"

// DefaultImage is the image if nothing names another.
const DefaultImage = "postgres:17"

const (
	superuser = "postgres"
	port      = "5432/tcp"

	// startPatience bounds the start of a container whose image is local.
	startPatience = time.Minute

	// greetPatience bounds one attempt to connect: while the network is being
	// set up, one may never be answered.
	greetPatience = 2 * time.Second
	pollInterval  = 50 * time.Millisecond
)

// Config says what server to start.
type Config struct {
	Image    string            // the zero value is what ImageEnv says, else DefaultImage
	Settings map[string]string // server settings, such as "fsync": "off"
}

// image is the image to use.
func (c Config) image() string {
	for _, image := range []string{c.Image, os.Getenv(ImageEnv)} {
		if image != "" {
			return image
		}
	}
	return DefaultImage
}

// Server is a PostgreSQL in a container.
type Server struct {
	container *testcontainers.DockerContainer
	image     string
	address   string
	password  string
	version   string
}

// Start starts a container and returns when the server in it accepts
// connections. The error is ErrNoEngine or ErrNoImage if it did not come to
// that.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	image := cfg.image()
	if err := available(ctx, image); err != nil {
		return nil, fmt.Errorf("containers: %w", err)
	}
	s := &Server{image: image, password: rand.Text()}
	if err := s.start(ctx, cfg.Settings); err != nil {
		err = errors.Join(err, s.Stop(context.WithoutCancel(ctx)))
		return nil, fmt.Errorf("containers: start %s: %w", image, err)
	}
	return s, nil
}

func (s *Server) start(ctx context.Context, settings map[string]string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	command := []string{"postgres"}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		command = append(command, "-c", name+"="+settings[name])
	}
	s.container, err = testcontainers.Run(ctx, s.image,
		testcontainers.WithExposedPorts(port),
		testcontainers.WithEnv(map[string]string{
			"POSTGRES_USER":     superuser,
			"POSTGRES_PASSWORD": s.password,
			"POSTGRES_DB":       superuser,
		}),
		testcontainers.WithCmd(command...),
	)
	if err != nil {
		return err
	}
	if err := s.await(ctx); err != nil {
		return fmt.Errorf("the server does not come up: %w%s", err, s.log(context.WithoutCancel(ctx)))
	}
	return nil
}

// addresses are where the server may be. In a container, testcontainers takes
// the engine for the host's, and the gateway for the way to it; an engine in
// the same container is at localhost all the same. Our password tells our
// server from another's.
func (s *Server) addresses(ctx context.Context) ([]string, error) {
	host, err := s.container.Host(ctx)
	if err != nil {
		return nil, err
	}
	mapped, err := s.container.MappedPort(ctx, port)
	if err != nil {
		return nil, err
	}
	var addresses []string
	for _, h := range []string{"localhost", host} {
		addresses = append(addresses, net.JoinHostPort(h, mapped.Port()))
	}
	return slices.Compact(addresses), nil
}

// await waits until the server accepts connections. The server that an image
// starts to set itself up does not listen on TCP, so a connection is the one
// sure sign. The log is none: it says "ready" of both.
func (s *Server) await(ctx context.Context) error {
	addresses, err := s.addresses(ctx)
	if err != nil {
		return err
	}
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		var errs []error
		for _, s.address = range addresses {
			err := s.greet(ctx)
			if err == nil {
				return nil
			}
			errs = append(errs, err)
		}
		if state, err := s.container.State(ctx); err == nil && !state.Running {
			return fmt.Errorf("the container ended with code %d", state.ExitCode)
		}
		select {
		case <-ctx.Done():
			return errors.Join(append(errs, ctx.Err())...)
		case <-ticker.C:
		}
	}
}

// greet connects once, and learns the server's version.
func (s *Server) greet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, greetPatience)
	defer cancel()
	conn, err := pgconn.Connect(ctx, s.URL(superuser))
	if err != nil {
		return err
	}
	s.version, _, _ = strings.Cut(conn.ParameterStatus("server_version"), " ")
	return conn.Close(ctx)
}

// URL returns a connection string for a database of the server, for the
// superuser.
func (s *Server) URL(database string) string {
	return connString(s.address, s.password, database)
}

func connString(address, password, database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(superuser, password),
		Host:     address,
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Version returns the server's version, such as 17.5.
func (s *Server) Version() string { return s.version }

// Description says for people which server this is, such as "PostgreSQL 17.5 in
// a container of postgres:17".
func (s *Server) Description() string {
	return fmt.Sprintf("PostgreSQL %s in a container of %s", s.Version(), s.image)
}

// Stop removes the container and its data.
func (s *Server) Stop(ctx context.Context) error {
	err := testcontainers.TerminateContainer(s.container,
		testcontainers.StopContext(ctx), testcontainers.StopTimeout(0)) // nobody needs the data
	if err != nil {
		return fmt.Errorf("containers: stop: %w", err)
	}
	return nil
}

// log returns what the container has printed, set apart in an error text.
func (s *Server) log(ctx context.Context) string {
	if s.container == nil {
		return ""
	}
	logs, err := s.container.Logs(ctx)
	if err != nil {
		return ""
	}
	defer func() { _ = logs.Close() }()
	text, _ := io.ReadAll(logs) // as much as there is
	return "\n\t" + strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", "\n\t")
}
