package org.apache.lucene.search.intervals;

/** Declared so that the server links; the `intervals` query is not available in this jar. */
public final class Intervals {
    private Intervals() {}
}
