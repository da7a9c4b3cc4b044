//! Bounds what is read and kept of one API server, which may answer without end.

use std::io::{self, Write};

use kube::api::ListParams;
use kube::core::ListMeta;
use serde::Serialize;
use thiserror::Error;

/// Objects of one list, or of all watches of one untrusted server.
pub const OBJECTS: usize = 200_000;
/// Pages of one list.
pub const PAGES: usize = 4000;
/// Bytes that are kept of one list.
pub const BYTES: usize = 128 << 20;

/// Why no more is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Beyond {
    #[error("it has more than {OBJECTS} objects")]
    Objects,
    #[error("it has more than {PAGES} pages")]
    Pages,
    #[error("its objects take more than {0} bytes")]
    Bytes(usize),
}

/// The size of one list so far.
#[derive(Debug, Default)]
pub struct Pages {
    pages: usize,
    objects: usize,
    bytes: usize,
}

impl Pages {
    /// Counts a page of `objects` and prepares `params` for the next one. Returns whether there is one.
    ///
    /// # Errors
    /// If the list exceeds a bound.
    pub fn follow(
        &mut self,
        params: &mut ListParams,
        page: ListMeta,
        objects: usize,
    ) -> Result<bool, Beyond> {
        self.pages += 1;
        self.objects = self.objects.saturating_add(objects);
        params.continue_token = page.continue_.filter(|token| !token.is_empty());
        let more = params.continue_token.is_some();
        match more {
            _ if self.objects > OBJECTS => Err(Beyond::Objects),
            true if self.pages >= PAGES => Err(Beyond::Pages),
            more => Ok(more),
        }
    }

    /// Counts what is kept of an object.
    ///
    /// # Errors
    /// If that is more than is kept of one list.
    pub fn keep(&mut self, bytes: usize) -> Result<(), Beyond> {
        self.bytes = self.bytes.saturating_add(bytes);
        match self.bytes > BYTES {
            true => Err(Beyond::Bytes(BYTES)),
            false => Ok(()),
        }
    }
}

/// Bytes that a map of one entry takes in addition to its JSON.
const OPENED: usize = 512;

/// Estimates the bytes that `content` takes in memory: the size of its JSON, plus an overhead for each object and list.
pub fn weight(content: &impl Serialize) -> usize {
    let mut weight = Weight(0);
    // It ends early only if a key is not a string, which no API object has.
    drop(serde_json::to_writer(&mut weight, content));
    weight.0
}

struct Weight(usize);

impl Write for Weight {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let opened = bytes.iter().filter(|byte| matches!(**byte, b'{' | b'['));
        self.0 += bytes.len() + OPENED * opened.count();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nested_maps_weigh_more_than_their_text() {
        assert_eq!(weight(&json!("text")), 6);
        assert_eq!(weight(&json!([{"a": {}}])), 10 + 3 * OPENED);
    }

    #[test]
    fn list_ends_at_each_bound() {
        let page = |token: &str| ListMeta {
            continue_: Some(token.to_owned()),
            ..ListMeta::default()
        };
        let mut params = ListParams::default();
        let mut pages = Pages::default();
        let mut follow = |token, objects| pages.follow(&mut params, page(token), objects);
        assert_eq!(follow("more", OBJECTS), Ok(true));
        assert_eq!(follow("", 0), Ok(false));
        assert_eq!(follow("", 1), Err(Beyond::Objects));
        assert_eq!(pages.keep(BYTES), Ok(()));
        assert_eq!(pages.keep(1), Err(Beyond::Bytes(BYTES)));
    }
}
