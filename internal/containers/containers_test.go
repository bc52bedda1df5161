package containers

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// forgetAfter is a time in which any server ends and any connection fails.
const forgetAfter = time.Minute

func TestContainerIsAServerUntilItIsStopped(t *testing.T) {
	s, err := Start(t.Context(), Config{Settings: map[string]string{"fsync": "off", "max_connections": "33"}})
	if errors.Is(err, ErrNoEngine) || errors.Is(err, ErrNoImage) {
		t.Skipf("%v (scripts/image makes an image without a registry)", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	t.Log(s.Description())
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	var version, connections string
	row := conn.QueryRow(t.Context(), "select split_part(version(), ' ', 2), current_setting('max_connections')")
	if err := row.Scan(&version, &connections); err != nil {
		t.Fatal(err)
	}
	if version != s.Version() || connections != "33" {
		t.Errorf("version %s, %s connections; want %s, 33", version, connections, s.Version())
	}
	// A query that the server compiles, if it can.
	if _, err := conn.Exec(t.Context(), "set jit_above_cost = 0"); err != nil {
		t.Fatal(err)
	}
	var sum int
	if err := conn.QueryRow(t.Context(), "select sum(n)::int from generate_series(1, 1000) n").Scan(&sum); err != nil || sum != 500500 {
		t.Errorf("sum is %d, %v", sum, err)
	}
	wrong := connString(s.address, "guess", "postgres")
	if conn, err := pgx.Connect(t.Context(), wrong); err == nil {
		_ = conn.Close(t.Context())
		t.Error("any password will do")
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), forgetAfter)
	defer cancel()
	if err := conn.Ping(ctx); err == nil {
		t.Error("the server still answers")
	}
}

func TestImageThatIsNowhereIsSaidInOneLine(t *testing.T) {
	_, err := Start(t.Context(), Config{Image: "pgxlock.invalid/no-such-image:1"})
	if errors.Is(err, ErrNoEngine) {
		t.Skip(err)
	}
	if !errors.Is(err, ErrNoImage) {
		t.Fatalf("got %v, want ErrNoImage", err)
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %v", err)
	}
}

func TestImageIsTheConfiguredElseTheEnvironmentsElseTheDefault(t *testing.T) {
	t.Setenv(ImageEnv, "")
	if got := (Config{}).image(); got != DefaultImage {
		t.Errorf("got %s, want %s", got, DefaultImage)
	}
	t.Setenv(ImageEnv, "from/environment:1")
	if got := (Config{}).image(); got != "from/environment:1" {
		t.Errorf("got %s, want the environment's", got)
	}
	if got := (Config{Image: "configured:1"}).image(); got != "configured:1" {
		t.Errorf("got %s, want the configured", got)
	}
}
