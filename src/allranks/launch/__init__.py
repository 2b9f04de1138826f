"""From a plan to argv and environment, and the module that starts and watches the processes."""
