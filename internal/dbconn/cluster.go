package dbconn

import (
	"fmt"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A cluster is where a connection ends: a name, or a list of hosts, may lead to another one after a
// while. The zero cluster is not known.
type cluster struct {
	system   int64 // the identifier that a cluster has for as long as it exists
	timeline int64 // grows with each promotion
}

// old returns an error if the server was the primary before the one that this process has used.
func (in *Installation) old(c cluster) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if c.system != in.cluster.system || c.timeline >= in.cluster.timeline {
		return nil
	}
	return fmt.Errorf("%w: the server is an old primary, on timeline %d of a cluster whose timeline %d was in use: fence it off, or bring it back as a standby", lockerr.ErrUnavailable, c.timeline, in.cluster.timeline)
}

// enter records the cluster of a new connection. It returns the identifier of the one before if that
// was another one, otherwise 0.
func (in *Installation) enter(c cluster) (left int64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	was := in.cluster
	switch c.system {
	case 0: // as a role without the right sees it
		return 0
	case was.system:
		c.timeline = max(c.timeline, was.timeline)
	default:
		left = was.system
	}
	in.cluster = c
	return left
}

// elsewhere reports whether a connection that ends in the cluster is not where the last one ends.
func (in *Installation) elsewhere(c cluster) bool {
	if in == nil || c.system == 0 {
		return false
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	return c.system != in.cluster.system
}

// CheckMoved returns an error if a later connection to the Place has ended in another cluster.
func (in *Installation) CheckMoved(c *Conn) error {
	if in.elsewhere(c.cluster) {
		return fmt.Errorf("%w: another connection ends in another cluster now", lockerr.ErrUnavailable)
	}
	return nil
}

// ErrMoved returns why locks are lost that were held on another cluster.
func ErrMoved(was, is int64) error {
	return fmt.Errorf("the database is on another cluster now, with system identifier %d: it was %d", is, was)
}
