// The server runs as another user where we are root, which PostgreSQL refuses.

package pgserver

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
)

// account is the unprivileged user that the server runs as when we are root.
// A nil account means ourselves.
type account struct {
	name     string
	uid, gid uint32
}

// serverAccount returns postgres, else nobody, when we are root, else nil.
func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	var errs []error
	for _, name := range []string{"postgres", "nobody"} {
		a, err := lookupAccount(name)
		if err == nil {
			return a, nil
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("PostgreSQL does not run as root, and there is no other user to run it as: %w", errors.Join(errs...))
}

func lookupAccount(name string) (*account, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", name, err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", name, err)
	}
	return &account{name: name, uid: uint32(uid), gid: uint32(gid)}, nil
}

// mkdir makes a directory that only the account can enter.
func (a *account) mkdir(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return a.own(path)
}

// own gives a file to the account.
func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	return os.Chown(path, int(a.uid), int(a.gid))
}
