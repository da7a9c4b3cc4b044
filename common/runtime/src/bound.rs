//! Limits the lists that a process reads from one API server and keeps: objects, pages and bytes.

use std::fmt::Debug;
use std::io::{self, Write};

use kube::api::{Api, ListParams};
use kube::core::ListMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::call::{ApiError, call};

/// Objects of one list, or of all watches of one untrusted server.
pub const OBJECTS_MAX: usize = 200_000;
/// Pages of one list.
pub const PAGES_MAX: usize = 4000;
/// Bytes that are kept of one list.
pub const BYTES_MAX: usize = 128 << 20;

/// Why no more is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ExceededBound {
    #[error("it has more than {OBJECTS_MAX} objects")]
    Objects,
    #[error("it has more than {PAGES_MAX} pages")]
    Pages,
    #[error("its objects take more than {0} bytes")]
    Bytes(usize),
}

/// Why a list cannot be read. `attempt` names the operation and the objects.
#[derive(Debug, Error)]
pub enum ListError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("{attempt} failed")]
    TooLong {
        attempt: String,
        source: ExceededBound,
    },
}

/// Lists all objects, page by page.
///
/// # Errors
/// If a call fails, or if the list exceeds a bound.
pub async fn list_all<K: Clone + Debug + DeserializeOwned>(
    api: &Api<K>,
    attempt: &str,
    mut params: ListParams,
) -> Result<Vec<K>, ListError> {
    let mut objects = Vec::new();
    let mut size = ListSize::default();
    loop {
        let page = call(attempt.to_owned(), api.list(&params)).await?;
        let count = page.items.len();
        objects.extend(page.items);
        let has_more = size.next_page(&mut params, page.metadata, count);
        let has_more = has_more.map_err(|source| ListError::TooLong {
            attempt: attempt.to_owned(),
            source,
        })?;
        if !has_more {
            return Ok(objects);
        }
    }
}

/// The size of one list so far.
#[derive(Debug, Default)]
pub struct ListSize {
    pages: usize,
    objects: usize,
    bytes: usize,
}

impl ListSize {
    /// Counts a page of `objects` and prepares `params` for the next one. Returns whether there is one.
    ///
    /// # Errors
    /// If the list exceeds a bound.
    pub fn next_page(
        &mut self,
        params: &mut ListParams,
        page: ListMeta,
        objects: usize,
    ) -> Result<bool, ExceededBound> {
        self.pages += 1;
        self.objects = self.objects.saturating_add(objects);
        params.continue_token = page.continue_.filter(|token| !token.is_empty());
        let has_more = params.continue_token.is_some();
        match has_more {
            _ if self.objects > OBJECTS_MAX => Err(ExceededBound::Objects),
            true if self.pages >= PAGES_MAX => Err(ExceededBound::Pages),
            has_more => Ok(has_more),
        }
    }

    /// Counts the bytes that are kept of an object.
    ///
    /// # Errors
    /// If that is more than is kept of one list.
    pub fn add_bytes(&mut self, bytes: usize) -> Result<(), ExceededBound> {
        self.bytes = self.bytes.saturating_add(bytes);
        match self.bytes > BYTES_MAX {
            true => Err(ExceededBound::Bytes(BYTES_MAX)),
            false => Ok(()),
        }
    }
}

/// Bytes that a map of one entry takes in addition to its JSON.
const MAP_OVERHEAD: usize = 512;

/// Estimates the bytes that `content` takes in memory: the size of its JSON, plus an overhead for each object and list.
pub fn memory_size(content: &impl Serialize) -> usize {
    let mut counter = SizeCounter(0);
    // It ends early only if a key is not a string, which no API object has.
    drop(serde_json::to_writer(&mut counter, content));
    counter.0
}

struct SizeCounter(usize);

impl Write for SizeCounter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let openings = bytes.iter().filter(|byte| matches!(**byte, b'{' | b'['));
        self.0 += bytes.len() + MAP_OVERHEAD * openings.count();
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
        assert_eq!(memory_size(&json!("text")), 6);
        assert_eq!(memory_size(&json!([{"a": {}}])), 10 + 3 * MAP_OVERHEAD);
    }

    #[test]
    fn list_ends_at_each_bound() {
        let page = |token: &str| ListMeta {
            continue_: Some(token.to_owned()),
            ..ListMeta::default()
        };
        let mut params = ListParams::default();
        let mut size = ListSize::default();
        let mut next_page = |token, objects| size.next_page(&mut params, page(token), objects);
        assert_eq!(next_page("more", OBJECTS_MAX), Ok(true));
        assert_eq!(next_page("", 0), Ok(false));
        assert_eq!(next_page("", 1), Err(ExceededBound::Objects));
        assert_eq!(size.add_bytes(BYTES_MAX), Ok(()));
        assert_eq!(size.add_bytes(1), Err(ExceededBound::Bytes(BYTES_MAX)));
    }
}
