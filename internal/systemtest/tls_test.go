//go:build unix

package systemtest_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestLockersEncryptAsTheirPoolDoes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	db := testkit.On(t, "", server)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	roots := encrypt(t, server, db)
	pool := pgtest.Pool(t, server.TCPURL("postgres"), func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig = &tls.Config{RootCAs: roots, ServerName: "pgxlock.test"}
	})
	through := &pgtest.DB{Pool: pool}
	lease := testkit.Acquire(t, testkit.NewLocker(t, through, &pgxlock.LeaseConfig{Owner: "encrypted lease"}), "k")
	if err := lease.Renew(t.Context()); err != nil {
		t.Error(err)
	}
	if !testkit.Query[bool](t, db, "select count(*) >= 2 and bool_and(ssl) from pg_stat_ssl join pg_stat_activity using (pid) where application_name = 'pgxlock encrypted lease'") {
		t.Error("a connection for leases is not encrypted")
	}
	locks := testkit.NewAdvisory(t, through, &pgxlock.AdvisoryConfig{Owner: "encrypted"})
	testkit.UseAdvisory(t, locks, db, "k")
	all := testkit.AcquireMany(t, locks, 500)
	if !testkit.Query[bool](t, db, "select bool_and(ssl) from pg_stat_ssl join pg_stat_activity using (pid) where application_name = 'pgxlock encrypted'") {
		t.Error("the session is not encrypted")
	}
	for _, lock := range all {
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	// A server that is not who it should be gets no lock.
	stranger := pgtest.Pool(t, server.TCPURL("postgres"), func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig = &tls.Config{RootCAs: roots, ServerName: "somebody.else"}
	})
	behind := &pgtest.DB{Pool: stranger}
	for _, locks := range []*pgxlock.Locker{testkit.NewLocker(t, behind, nil), testkit.NewAdvisory(t, behind, nil)} {
		_, err := locks.TryAcquire(t.Context(), "k")
		if _, ok := errors.AsType[x509.HostnameError](err); !ok {
			t.Errorf("a certificate of somebody else: %v", err)
		}
	}
}

// encrypt gives a server a certificate, and returns who vouches for it.
func encrypt(t *testing.T, server *pgserver.Server, db *pgtest.DB) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "pgxlock.test"}, DNSNames: []string{"pgxlock.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	owner, err := os.Stat(server.DataDir())
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{"server.crt": {Type: "CERTIFICATE", Bytes: certificate}, "server.key": {Type: "EC PRIVATE KEY", Bytes: secret}} {
		path := filepath.Join(server.DataDir(), file)
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		if as, ok := owner.Sys().(*syscall.Stat_t); ok {
			if err := os.Chown(path, int(as.Uid), int(as.Gid)); err != nil {
				t.Fatal(err)
			}
		}
	}
	db.Exec(t, "alter system set ssl = on")
	db.Exec(t, "select pg_reload_conf()")
	pgtest.Until(t, "the server encrypts", func() bool { return testkit.Query[string](t, testkit.On(t, "", server), "show ssl") == "on" })
	roots := x509.NewCertPool()
	parsed, err := x509.ParseCertificate(certificate)
	if err != nil {
		t.Fatal(err)
	}
	roots.AddCert(parsed)
	return roots
}
