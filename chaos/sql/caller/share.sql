SELECT acquired, $1, coalesce(fencing_token, 0), ticket, ask_again_ms FROM acquire_shared_in_turn($1, $2, $3, $4)
