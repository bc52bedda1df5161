// Servers that are started one after the other share the work of initdb.

package pgserver

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// ClustersEnv is the environment variable that names the directory whose clusters the processes
// of a run of tests copy. Where it is empty each process makes its own.
const ClustersEnv = "PGXLOCK_TEST_CLUSTERS"

// Clusters copies new clusters instead of making each: initdb costs most of a second of
// a processor, and a copy a twentieth of that. All copies have one system identifier,
// as a cluster and its standbys have. The zero value is ready for use.
type Clusters struct {
	mu   sync.Mutex
	made map[string]*cluster // by the programs and the arguments of initdb
}

// A cluster is one that no server was started on.
type cluster struct {
	dir      *directory // that is its own; nil for one that other processes copy as well
	data     string
	password string // is part of what is copied
}

// copyTo copies a cluster to a server that has none. The first one makes it.
func (c *Clusters) copyTo(ctx context.Context, s *Server) error {
	first, err := c.first(ctx, s)
	if err != nil {
		return err
	}
	s.password = first.password
	return run(ctx, s.dir.data(), s.as, "cp", "-Rp", first.data+"/.", s.dir.data())
}

// first returns the cluster to copy for that server.
func (c *Clusters) first(ctx context.Context, s *Server) (*cluster, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cfg := Config{Binaries: s.cfg.Binaries, InitdbArgs: s.cfg.InitdbArgs}
	key := fmt.Sprintf("%s %q", cfg.Binaries, cfg.InitdbArgs)
	if first := c.made[key]; first != nil {
		return first, nil
	}
	first, err := sharedCluster(ctx, key, cfg, s.as)
	if errors.Is(err, fs.ErrPermission) || err == nil && first == nil { // the directory is another user's, or there is none
		first, err = ownCluster(ctx, cfg)
	}
	if err != nil {
		return nil, err
	}
	if c.made == nil {
		c.made = make(map[string]*cluster)
	}
	c.made[key] = first
	return first, nil
}

// ownCluster makes a cluster in a directory of its own.
func ownCluster(ctx context.Context, cfg Config) (*cluster, error) {
	s, err := prepareServer(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.initdb(ctx); err != nil {
		return nil, errors.Join(err, s.dir.remove())
	}
	return &cluster{dir: s.dir, data: s.dir.data(), password: s.password}, nil
}

// sharedCluster returns the cluster of that key in the directory that ClustersEnv names, and makes it if
// no process has. Without such a directory it returns none.
func sharedCluster(ctx context.Context, key string, cfg Config, as *account) (*cluster, error) {
	parent := os.Getenv(ClustersEnv)
	if parent == "" {
		return nil, nil
	}
	hash := sha256.Sum256(fmt.Appendf(nil, "%d %s", os.Geteuid(), key))
	place := &directory{path: filepath.Join(parent, hex.EncodeToString(hash[:8]))}
	for {
		password, err := os.ReadFile(place.copied())
		if err == nil {
			return &cluster{data: place.data(), password: string(password)}, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		lock, err := os.OpenFile(place.path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if mine, err := tryLock(lock); mine && gone(place.path) {
			return makeSharedCluster(ctx, place, cfg, as, lock)
		} else if err := errors.Join(err, lock.Close()); err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(pollInterval):
		}
	}
}

// makeSharedCluster makes a cluster beside its place, where it appears when it is complete. The lock is
// held until then.
func makeSharedCluster(ctx context.Context, place *directory, cfg Config, as *account, lock *os.File) (_ *cluster, err error) {
	defer func() { err = errors.Join(err, lock.Close()) }()
	s := &Server{cfg: cfg, as: as, log: &tail{}, password: rand.Text()}
	path, err := os.MkdirTemp(filepath.Dir(place.path), "new")
	if err != nil {
		return nil, err
	}
	s.dir = &directory{path: path}
	err = errors.Join(os.Chmod(path, 0o711), as.mkdir(s.dir.data()))
	if err == nil {
		err = s.initdb(ctx)
	}
	if err == nil {
		err = os.WriteFile(s.dir.copied(), []byte(s.password), 0o600)
	}
	if err == nil {
		err = os.Rename(path, place.path)
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(path))
	}
	return &cluster{data: place.data(), password: s.password}, nil
}

func gone(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// Remove removes what is copied. Servers that were started with it go on.
func (c *Clusters) Remove() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, first := range c.made {
		if first.dir != nil {
			errs = append(errs, first.dir.remove())
		}
	}
	clear(c.made)
	return errors.Join(errs...)
}

// ShareClusters makes a directory for clusters that this process copies, and all that it starts,
// until remove is called: then a run of many test programs needs one initdb. It does nothing
// where another program has done so.
func ShareClusters(ctx context.Context) (remove func() error, err error) {
	if os.Getenv(ClustersEnv) != "" {
		return func() error { return nil }, nil
	}
	s, err := prepareServer(ctx, Config{})
	if err != nil {
		return nil, fmt.Errorf("pgserver: share clusters: %w", err)
	}
	remove = func() error { return errors.Join(os.Unsetenv(ClustersEnv), s.dir.remove()) }
	if err := os.Setenv(ClustersEnv, s.dir.path); err != nil {
		return nil, errors.Join(err, remove())
	}
	return remove, nil
}
