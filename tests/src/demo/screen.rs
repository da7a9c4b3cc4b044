//! Prints the demo's steps and events, with the seconds since the start.

use std::{
    io::Write,
    time::{Duration, Instant},
};

#[derive(Debug)]
pub(crate) struct Screen {
    start: Instant,
}

impl Screen {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn step(&self, title: &str) {
        self.print(&format!("\n== {title}"));
    }

    pub(crate) fn event(&self, what: &str) {
        let seconds = self.elapsed().as_secs_f64();
        self.print(&format!("[{seconds:6.1} s] {what}"));
    }

    pub(crate) fn print(&self, text: &str) {
        // A reader that exits early, such as `head`, doesn't end the demo.
        writeln!(std::io::stdout().lock(), "{text}").ok();
    }
}
