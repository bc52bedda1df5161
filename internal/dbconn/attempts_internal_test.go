package dbconn

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

func TestEachAddressHasItsTimeToConnect(t *testing.T) {
	t.Parallel()
	names := map[string][]string{"one": {"10.0.0.1"}, "two": {"10.0.0.2", "10.0.0.3"}}
	for what, test := range map[string]struct {
		hosts []string // after the first
		first string
		tls   bool // each is tried with TLS and then without
		asked time.Duration
		most  time.Duration
		want  time.Duration
	}{
		"one host": {first: "one", want: DialTime},
		"TLS first: pgx has one timeout for both": {first: "one", tls: true, want: 2 * DialTime},
		"a socket":                                   {first: "/tmp", want: DialTime},
		"a socket, TLS first":                        {first: "/tmp", tls: true, want: 2 * DialTime},
		"a name with two addresses":                  {first: "two", want: DialTime / 2},
		"two addresses, TLS first: not in a row":     {first: "two", tls: true, want: DialTime / 2},
		"three addresses":                            {first: "one", hosts: []string{"two"}, want: DialTime / 3},
		"two hosts, TLS first":                       {first: "one", hosts: []string{"/tmp"}, tls: true, want: DialTime},
		"what the caller asks is for each":           {first: "one", hosts: []string{"two"}, tls: true, asked: time.Minute, want: time.Minute},
		"a renewal has what is left of the lease":    {first: "one", most: 8 * time.Second, want: 8 * time.Second},
		"the addresses share it":                     {first: "two", most: 8 * time.Second, want: 4 * time.Second},
		"also where the caller asks for more":        {first: "two", asked: time.Minute, most: 8 * time.Second, want: 4 * time.Second},
		"and not where the caller asks for less":     {first: "two", asked: time.Second, most: 8 * time.Second, want: time.Second},
		"a name that is not known is of the attempt": {first: "nowhere", want: DialTime},
	} {
		parsed, err := pgxpool.ParseConfig("host=x user=u sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		config := parsed.ConnConfig
		config.ConnectTimeout = test.asked
		var looked []string
		unknown := errors.New("unknown")
		config.LookupFunc = func(_ context.Context, host string) ([]string, error) {
			looked = append(looked, host)
			if addresses, ok := names[host]; ok {
				return addresses, nil
			}
			return nil, unknown
		}
		config.Host, config.Port, config.Fallbacks = test.first, 1, nil
		for i, host := range append([]string{test.first}, test.hosts...) {
			var secure *tls.Config
			if test.tls {
				secure = &tls.Config{InsecureSkipVerify: true}
			}
			if i > 0 {
				config.Fallbacks = append(config.Fallbacks, &pgconn.FallbackConfig{Host: host, Port: 1, TLSConfig: secure})
			}
			if test.tls {
				config.Fallbacks = append(config.Fallbacks, &pgconn.FallbackConfig{Host: host, Port: 1})
			}
		}
		d := Dialer{Config: parsed}
		if err := d.prepare(t.Context(), config, test.most); err != nil || config.ConnectTimeout != test.want {
			t.Errorf("%s: %s, want %s: %v", what, config.ConnectTimeout, test.want, err)
		}
		asked := len(looked)
		_, err = config.LookupFunc(t.Context(), test.first)
		if test.first == "nowhere" && !errors.Is(err, unknown) || len(looked) != asked && test.first != "/tmp" || len(slices.Compact(slices.Clone(looked))) != len(looked) {
			t.Errorf("%s: %q were looked up: %v", what, looked, err)
		}
	}
}

func TestAttemptsPauseAfterTheFailuresOfAll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := outageLog{servers: make(map[string]outage)}
		if pause := log.pause("a", time.Now()); pause > 0 {
			t.Errorf("before any failure: %s", pause)
		}
		var longest time.Duration
		for range 20 {
			log.failed("a")
			pause := log.pause("a", time.Now())
			longest = max(longest, pause)
			if pause <= 0 || pause > clock.MaxReconnectDelay {
				t.Errorf("a pause of %s", pause)
			}
		}
		if longest < clock.MaxReconnectDelay/2 {
			t.Errorf("after 20 failures: at most %s", longest)
		}
		if pause := log.pause("b", time.Now()); pause > 0 {
			t.Errorf("of another server: %s", pause)
		}
		time.Sleep(clock.MaxReconnectDelay)
		if pause := log.pause("a", time.Now()); pause > 0 {
			t.Errorf("long after: %s", pause)
		}
		log.failed("a")
		log.over("a")
		if pause := log.pause("a", time.Now()); pause > 0 {
			t.Errorf("after a success: %s", pause)
		}
	})
}

// A caller that leaves, or a Locker that is closed, says nothing of the server.
func TestWaitForAConnectionEndsWithWhyTheLastAttemptFailed(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("host=127.0.0.1 port=1 user=u sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	a := Attempts{Dialer: Dialer{Config: config}}
	if err := a.left(Now); errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("before an attempt: %v", err)
	}
	if _, err := a.Connect(t.Context(), Dial{}, nil); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatal(err)
	}
	for _, err := range []error{a.left(Now), a.Explain(lockerr.ErrNoAnswer)} {
		if !errors.Is(err, ErrConnecting) || !errors.Is(err, lockerr.ErrNoAnswer) || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("after one: %v", err)
		}
	}
	left, leave := context.WithCancel(t.Context())
	leave()
	if err := a.left(left); !errors.Is(err, context.Canceled) || errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("of a caller who has left: %v", err)
	}
}
