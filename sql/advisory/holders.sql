EXECUTE "pgxlock_holders /* session */"('/* key */', '/* space */')
