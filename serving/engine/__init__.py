"""vLLM as replicas: where weights come from, how a process is started, spoken to and watched."""
